"""The language model: embedding, LSTM layers, regularisation and head."""
