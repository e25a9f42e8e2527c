"""Reports as self-contained HTML files. No I/O: figures in, text out."""
