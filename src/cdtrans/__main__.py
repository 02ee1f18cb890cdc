"""`python -m cdtrans` is `cdtrans`."""

from cdtrans.entry import main

main()
