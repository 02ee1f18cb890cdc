// The gallery's filter. Without scripts it stays hidden and every pair is shown.
(function () {
  const form = document.getElementById("filter");
  if (!form) return;
  const pairs = Array.from(document.querySelectorAll(".pair"));
  const shown = document.getElementById("shown");
  function update() {
    const wanted = new FormData(form);
    let count = 0;
    for (const pair of pairs) {
      const fits = ["class", "round", "state"].every((key) => {
        const value = wanted.get(key);
        return value === "" || pair.dataset[key].split("\t").includes(value);
      });
      pair.hidden = !fits;
      count += fits;
    }
    shown.textContent = count + " of " + pairs.length + " pairs";
  }
  form.hidden = false;
  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  update();
})();

// A link to a folded section opens it, and paper has everything.
(function () {
  function open() {
    const section = document.getElementById(location.hash.slice(1));
    const part = section && section.querySelector(":scope > details.part");
    if (part) part.open = true;
  }
  addEventListener("hashchange", open);
  open();
  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details")) part.open = true;
  });
})();
