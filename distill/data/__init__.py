"""Training data: samples by index from generated tasks, files or data sets, packed into rows.

A row of a file or data set becomes a sample: its token ids, with its tail of end tokens
(`samples`). A step is fed packed rows, `data.row_length` places that hold several samples each
(`stream`). `python -m distill.data --inspect` shows what a model will see.
"""
