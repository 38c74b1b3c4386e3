"""README's table of what to expect, for a place that is planned in a moment."""

from __future__ import annotations

from tools.predictions import expected_gains


def test_a_row_has_what_is_chosen_and_by_how_much_it_wins(capsys, monkeypatch):
    monkeypatch.setattr(expected_gains, "PLACES", (("netmoe-gpt-s", "pcie", 8),))
    expected_gains.main()
    *_, row = capsys.readouterr().out.splitlines()
    _, model, place, chosen, gain, without, gain_without, _ = (cell.strip() for cell in row.split("|"))
    assert (model, place) == ("netmoe-gpt-s", "8 of pcie")
    assert chosen.startswith("`") and "1F1B" not in without
    assert float(gain) >= 1 and float(gain_without) >= 1
