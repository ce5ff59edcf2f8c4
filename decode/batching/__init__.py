"""What `decode.batch` does: its flags, its rows, their ledger, and the files it leaves."""
