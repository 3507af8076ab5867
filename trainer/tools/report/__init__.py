"""One self-contained HTML page about runs: read in a stream, reduced to what a screen shows, drawn by the browser."""
