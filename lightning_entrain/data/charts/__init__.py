"""Charts drawn from real tables, each with its table as OTSL text. Needs the extra ``demo``."""
