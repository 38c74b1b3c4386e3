"""What is raised where the imitated cluster cannot be had."""


class NetboxError(Exception):
    """One sentence for the user; the run ends with exit code 2."""
