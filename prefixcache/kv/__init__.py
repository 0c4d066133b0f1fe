"""WHERE the bytes are: page layout and page pools. torch, no I/O."""
