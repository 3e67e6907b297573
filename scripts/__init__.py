"""Developer scripts: quantise, train and write the demo model, check the repository."""
