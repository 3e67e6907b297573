"""From one row of logits to one token id. Knows no model, no batch and no event loop."""
