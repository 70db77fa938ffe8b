"""What people say of replies: storage, agreement, export, and what the annotation page is made of except the page."""
