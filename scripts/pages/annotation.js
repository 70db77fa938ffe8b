// Keys of the ranking tab: arrows mark a reply, digits give it a rank, Enter saves, s skips, b all bad, n next prompt.
// Keys of the scoring tab: arrows move the slider, 1 to 5 are its whole numbers, Enter saves, n next prompt.
(() => {
  let marked = 0;
  const cards = () => [...document.querySelectorAll("#cards .card")].filter((card) => card.offsetParent !== null);
  const mark = (place) => {
    const all = cards();
    marked = Math.max(0, Math.min(place, all.length - 1));
    document.body.dataset.marked = String(marked);
    if (all.length) all[marked].scrollIntoView({ block: "nearest" });
  };
  const ranked = (card) => card.querySelector("input[type=radio]:checked") !== null;
  const press = (id) => {
    const found = document.getElementById(id);
    const button = found && (found.tagName === "BUTTON" ? found : found.querySelector("button"));
    if (button && !button.disabled) button.click();
  };
  const give = (rank) => {
    const all = cards();
    const card = all[marked];
    const radio = card && card.querySelectorAll("input[type=radio]")[rank - 1];
    if (!radio) return;
    const sharing = document.querySelector("#ties input").checked;
    const isHeld = all.some((other, i) => i !== marked && other.querySelector("input:checked")?.value === radio.value);
    radio.click();
    if (isHeld && !sharing) return; // the server takes it back and says who holds it
    const rest = all.map((_, i) => (marked + 1 + i) % all.length).find((i) => i !== marked && !ranked(all[i]));
    if (rest !== undefined) mark(rest);
  };
  const slide = (change) => {
    const slider = document.querySelector("#score input[type=range]");
    slider.value = String(change(Number(slider.value)));
    slider.dispatchEvent(new Event("input", { bubbles: true }));
  };
  const tabs = [
    {
      keys: { Enter: "save", s: "skip", b: "all-bad", n: "rank-random" },
      arrow: (step) => mark(marked + step),
      digit: give,
    },
    {
      keys: { Enter: "save-score", n: "score-random" },
      arrow: (step) => slide((value) => value + step / 10),
      digit: (number) => number <= 5 && slide(() => number - 3),
    },
  ];
  const isShown = (id) => (document.getElementById(id)?.offsetParent ?? null) !== null;
  const typed = "textarea, select, [contenteditable=true], input:not([type=radio]):not([type=checkbox]):not([type=range])";

  document.addEventListener("keydown", (event) => {
    const tab = tabs.find(({ keys }) => isShown(keys.Enter));
    const isHeld = event.repeat && !event.key.startsWith("Arrow");
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || isHeld) return;
    if (!tab || event.target.closest(typed) !== null) return;
    if (event.key === "Enter" && event.target.closest("button")) return; // the button itself answers
    if (event.key.startsWith("Arrow")) {
      const isForward = (tab === tabs[0] ? ["ArrowRight", "ArrowDown"] : ["ArrowRight", "ArrowUp"]).includes(event.key);
      tab.arrow(isForward ? 1 : -1);
    } else if (/^[1-9]$/.test(event.key)) {
      tab.digit(Number(event.key));
    } else if (tab.keys[event.key]) {
      press(tab.keys[event.key]);
    } else {
      return;
    }
    event.preventDefault();
  });
  document.addEventListener("click", (event) => {
    const card = event.target.closest && event.target.closest("#cards .card");
    if (card && event.isTrusted) mark(cards().indexOf(card));
  });
  let shown = "";
  const look = () => {
    const texts = cards().map((card) => card.querySelector(".text")?.textContent).join("|");
    if (texts !== shown) mark(0); // another item
    shown = texts;
  };
  document.addEventListener("DOMContentLoaded", () => {
    new MutationObserver(look).observe(document.body, { childList: true, subtree: true, characterData: true });
  });
})();
