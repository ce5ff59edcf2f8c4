"""The plain decoders: the specifications that the engine must equal, token by token."""
