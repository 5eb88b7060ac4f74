"""Forward passes on a CPU as one compiled call: 4-bit products, what is between them, and the threads that share them."""
