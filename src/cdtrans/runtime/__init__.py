"""The machine: devices, ranks, processes, signals, the screen."""
