"""The sections of the page, one module each: records in, words, tables and figures out."""
