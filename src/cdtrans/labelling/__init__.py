"""A few target labels: choose images to label, read the labels, measure with them."""
