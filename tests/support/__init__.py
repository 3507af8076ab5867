"""What tests share: programs, servers and clusters that they start, and what is asked of what they leave."""
