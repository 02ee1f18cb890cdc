"""The first labels of a target: choose images to be labelled, read the labels, measure with them."""
