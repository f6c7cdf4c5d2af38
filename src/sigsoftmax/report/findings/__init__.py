"""Conclusions from records, as tables and sentences that terminal and page share."""
