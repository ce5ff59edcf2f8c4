"""The server: models of this project behind OpenAI's HTTP interface. Needs the extra `serve`."""
