"""The parts of the commands that decode: flags, prompts, the loop that is timed, what is shown."""
