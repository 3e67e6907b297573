"""What running a model costs, without running it: measured speeds, estimates from them, and replays of recorded routing."""
