"""What depends on the machine: devices, ranks, signals, the screen."""
