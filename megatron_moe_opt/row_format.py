"""The format of a packed row, in bytes: [hidden elements | lane]. Planning counts these bytes without PyTorch."""

LANE_BYTES = 16
"""The lane behind a row's hidden elements. It keeps rows 16-byte aligned where the hidden size does;
csrc/bindings/permute.cpp holds the same number."""

NOTE_BYTE = 8
"""Where in the lane there is room for a note, an int32, behind the bits of the row's probability."""
