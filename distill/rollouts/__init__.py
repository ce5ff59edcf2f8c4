"""Trajectories of a decoder on problems that it solves, to train on."""
