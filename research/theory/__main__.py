"""Simulate the supplement's two theorems: python -m research.theory --out FOLDER [--seed N]"""

import argparse
from pathlib import Path

from rich.table import Table

from cdtrans.errors import CdtransError
from cdtrans.runtime.screen import Screen
from research.theory.study import SHOWN, run_study


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m research.theory", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for theory.json and the figures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet", action="store_true", help="print the results only")
    options = parser.parse_args()
    if options.seed < 0:
        parser.error("--seed must be at least 0")
    screen = Screen(quiet=options.quiet)
    try:
        study = run_study(options.out, seed=options.seed, screen=screen)
    except (CdtransError, OSError) as error:
        parser.error(str(error))
    table = Table(*SHOWN, title="noise |x - u| in units of sigma")
    for cells in study.table(SHOWN):
        table.add_row(*cells)
    screen.result(table)
    for line in study.findings():
        screen.result(line)
    screen.say(f"All numbers: {options.out / 'theory.json'}; the figures are beside it.")


if __name__ == "__main__":
    main()
