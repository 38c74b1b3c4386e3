"""The command line `moe-opt`: a room for each thing that a reader looks for, and what all of them use."""
