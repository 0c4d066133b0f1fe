"""From requests to tokens: sequences, scheduler, batches, the engine thread."""
