"""Language models: text, AWD-LSTM with any output head, NT-ASGD, finetuning, dynamic evaluation."""
