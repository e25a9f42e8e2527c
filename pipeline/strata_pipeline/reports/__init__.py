"""Reports as single HTML files. No I/O: figures in, text out."""
