"""A software accelerator for the tests: streams that are queues, run in any order that their waits allow."""
