"""One model on the ranks of a process group: which rank computes which experts, and what it sends where."""
