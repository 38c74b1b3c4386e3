"""Errors that a user can act on."""

from __future__ import annotations


class ConfigurationError(ValueError):
    """A setting that cannot work. The message is one sentence: the flag or file, its value, and the way out.

    Raised before training starts, or in the first pass or step that shows it. Names of files, and what is in them, may
    hold what a terminal obeys or what cannot be encoded: it is shown escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class DisagreementError(ConfigurationError):
    """Ranks were told different things, or some of them were refused what others were not: raised by all together."""


class ExtensionError(ImportError):
    """The compiled extension is missing, stale or built for another PyTorch. One sentence that says how to build it."""


class RoutingError(RuntimeError):
    """Ranks that hold the same tokens have routed them differently: raised in the pass in which they did."""


class LayerError(RuntimeError):
    """A pass of a MoE layer failed, or a collective beside it: here, or on another rank, which is named.

    `__cause__` is what was raised on this rank.
    """


def sentence(error: Exception) -> str:
    """Returns the message as it was first raised: Megatron raises errors again, naming each module it was building."""
    while (first := error.__context__) is not None and type(first) is type(error) and str(error).startswith(str(first)):
        error = first
    return str(error)


def printable(text: str) -> str:
    """Returns the text with escapes in the place of all that is neither printable nor an ordinary space."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def reason(error: BaseException) -> str:
    """Returns what another library's error says, as part of a sentence: its first line, and no more than fits there."""
    text = str(error).partition("\n")[0] or type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


def kind_and_reason(error: BaseException) -> str:
    """Returns the kind of another library's error and all that it says, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
