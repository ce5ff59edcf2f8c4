"""Ablations of a training: variants of one configuration, several seeds each, measured alike."""
