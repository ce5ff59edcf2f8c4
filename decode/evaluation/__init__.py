"""What `decode.evaluate` does: its flags, the judging of responses, and what follows from it."""
