"""Computing what ``family`` defines: the readable reference, and the fast backends."""
