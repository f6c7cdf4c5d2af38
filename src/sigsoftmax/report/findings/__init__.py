"""What records come to, as tables and sentences that terminal and page share."""
