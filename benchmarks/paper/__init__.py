"""Tables of papers, measured again: a table is a YAML file here, with the figures published."""
