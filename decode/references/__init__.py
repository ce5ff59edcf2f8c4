"""Plain references of further decoders, as `decode.reference` is: no engine, no slots, no spans."""
