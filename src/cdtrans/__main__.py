"""`python -m cdtrans` is `cdtrans`."""

from cdtrans.cli import main

main()
