"""Faults put into training runs of four ranks: every rank must end soon, and say which rank failed first and where.

    python -m tests.faults --injections 200

`cases` says what is put where, `rank` is what a rank runs, `campaign` runs a case and judges it.
"""
