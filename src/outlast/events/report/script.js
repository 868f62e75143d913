"use strict";
(() => {
  const tip = document.getElementById("tip");
  const show = (target, x, y) => {
    tip.textContent = target.dataset.tip;
    tip.hidden = false;
    const room = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(x + 12, innerWidth - room.width - 8)) + "px";
    tip.style.top = (y + 22 + room.height > innerHeight ? y - room.height - 12 : y + 18) + "px";
  };
  const tipped = (event) => event.target.closest && event.target.closest("[data-tip]");
  document.addEventListener("mousemove", (event) => {
    const target = tipped(event);
    if (target) show(target, event.clientX, event.clientY);
    else tip.hidden = true;
  });
  document.addEventListener("focusin", (event) => {
    const target = tipped(event);
    if (!target) return;
    const place = target.getBoundingClientRect();
    show(target, place.left, place.top);
  });
  document.addEventListener("focusout", () => { tip.hidden = true; });

  // One mark is in the order of the Tab key; the arrow keys move between them.
  const marks = [...document.querySelectorAll(".canvas .mark")];
  if (marks.length) marks[0].setAttribute("tabindex", "0");
  const canvas = document.querySelector(".canvas");
  const keys = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") tip.hidden = true;
    const at = marks.indexOf(event.target);
    if (at < 0 || !(event.key in keys)) return;
    event.preventDefault();
    const next = marks[(at + keys[event.key] + marks.length) % marks.length];
    marks[at].setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
    next.scrollIntoView({ block: "nearest", inline: "nearest" });
  });

  for (const button of document.querySelectorAll("button[data-zoom]")) {
    button.addEventListener("click", () => {
      const view = canvas.parentElement;
      const middle = (view.scrollLeft + view.clientWidth / 2) / view.scrollWidth;
      canvas.dataset.zoom = button.dataset.zoom;
      canvas.style.width = 100 * button.dataset.zoom + "%";
      view.scrollLeft = middle * view.scrollWidth - view.clientWidth / 2;
      for (const other of document.querySelectorAll("button[data-zoom]")) {
        other.setAttribute("aria-pressed", String(other === button));
      }
    });
  }

  // Everything is shown in print.
  addEventListener("beforeprint", () => {
    for (const each of document.querySelectorAll("details:not([open])")) {
      each.open = true;
      each.dataset.closed = "";
    }
  });
  addEventListener("afterprint", () => {
    for (const each of document.querySelectorAll("details[data-closed]")) {
      each.open = false;
      delete each.dataset.closed;
    }
  });
})();
