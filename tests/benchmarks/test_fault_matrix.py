"""The table of faults: repeated cases replace their existing rows, and all jobs went on."""

from benchmarks import faults


def test_the_page_is_what_its_rows_make():
    rows = faults._written()
    assert rows and {key[1:] for key in rows} <= {(place, kind) for place in faults.PLACES for kind in faults.KINDS}
    assert faults._page(rows, faults._survived()) == faults.PAGE.read_text()
    assert not [row for row in rows.values() if "**" in row]
