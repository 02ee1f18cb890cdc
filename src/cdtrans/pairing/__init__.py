"""Which source image goes with which target image (section 3.2 of the paper)."""
