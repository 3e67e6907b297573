"""What happened when, on which resource: recording, Chrome JSON, overlap numbers. Knows no model, no loop."""
