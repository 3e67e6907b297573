"""One model over several ranks: experts have owners, and tokens travel to them. Over torch.distributed."""
