// Keys of the comparison: 1 or left arrow is the first, 2 or right arrow the second, 0 equal, b both bad, s skip, n start.
(() => {
  const keys = {
    1: "left", ArrowLeft: "left", 2: "right", ArrowRight: "right", 0: "equal", b: "both-bad", s: "skip", n: "start",
  };
  const typed = "textarea, select, [contenteditable=true], input:not([type=radio]):not([type=checkbox])";
  document.addEventListener("keydown", (event) => {
    const found = document.getElementById(keys[event.key]);
    const button = found && (found.tagName === "BUTTON" ? found : found.querySelector("button"));
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || event.repeat) return;
    if (!button || button.disabled || button.offsetParent === null || event.target.closest(typed) !== null) return;
    button.click();
    event.preventDefault();
  });
})();
