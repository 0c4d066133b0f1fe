"""The images, and the proof that their recipe works."""
