"""Speech to text with Whisper."""
