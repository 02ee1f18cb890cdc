"""`python -m cdtrans` is `cdtrans`."""

from cdtrans.cli.entry import main

main()
