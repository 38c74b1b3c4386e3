"""The five papers' numbers beside ours: one module a paper, of which docs/papers and tests/papers are made."""
