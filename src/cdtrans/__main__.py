"""The program: `cdtrans`, or `python -m cdtrans`. Ctrl-C is answered from here on, before anything slow is imported."""

import os
import signal


def main() -> None:
    """Run `cdtrans.cli.app`. Ctrl-C is clean also while that is imported and when all is done."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # nohup has it ignored
    if ours:
        signal.signal(signal.SIGINT, _leave)
    from cdtrans.cli.app import run_program

    try:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run_program()
    except KeyboardInterrupt:  # before or after the part that expects it
        _leave()
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _leave(*_: object) -> None:
    os.write(2, b"error: Interrupted.\n")
    os._exit(130)


if __name__ == "__main__":
    main()
