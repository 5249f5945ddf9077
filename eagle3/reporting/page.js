// Charts answer to pointer, finger and arrow keys: a line goes to the nearest point, and the legend shows the values there.
for (const figure of document.querySelectorAll("figure")) {
  const svg = figure.querySelector("svg"), cursor = svg.querySelector(".cursor");
  const circles = svg.querySelectorAll("circle");
  const series = [...figure.querySelectorAll("[data-x]")].map((entry, index) => {
    const numbers = (text) => (text ? text.split(" ").map(Number) : []);
    const { x, y, at, values } = entry.dataset;
    return { row: entry.parentNode, xs: numbers(x), ys: numbers(y), ats: at.split(";"), values: values.split(";"),
      entry, circle: circles[index] };
  });
  const rows = [...figure.querySelectorAll(".key")].map((row) => series.filter((each) => each.row === row));
  const places = [...new Set(series.flatMap((each) => each.xs))].sort((a, b) => a - b);
  if (!places.length) continue;
  const nearest = (xs, x) => xs.reduce((best, each, i) => (Math.abs(each - x) < Math.abs(xs[best] - x) ? i : best), 0);
  let place = places.length - 1;

  function show(x) {
    place = nearest(places, x);
    for (const row of rows) {
      const found = row.filter((each) => each.xs.length).map((each) => ({ ...each, n: nearest(each.xs, places[place]) }));
      if (!found.length) continue;
      const away = (each) => Math.abs(each.xs[each.n] - places[place]);
      const closest = found.reduce((a, b) => (away(b) < away(a) ? b : a)), at = closest.ats[closest.n];
      closest.row.querySelector(".where b").textContent = at;
      for (const { n, xs, ys, ats, values, entry, circle } of found) {
        entry.querySelector("b").textContent = values[n];
        entry.querySelector(".soft").textContent = ats[n] === at ? "" : ` at ${ats[n]}`;
        circle.setAttribute("cx", xs[n]);
        circle.setAttribute("cy", ys[n]);
      }
    }
    cursor.setAttribute("transform", `translate(${places[place]} 0)`);
  }

  const point = (event) => {
    figure.classList.add("pointed");
    show(new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x);
  };
  const leave = () => {
    show(places.at(-1));
    figure.classList.remove("pointed");
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", (event) => event.pointerType === "touch" || leave()); // a tap's values stay
  svg.addEventListener("blur", leave);
  svg.tabIndex = 0;
  svg.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -places.length, End: places.length };
    if (!(event.key in steps)) return;
    event.preventDefault();
    figure.classList.add("pointed");
    show(places[Math.min(places.length - 1, Math.max(0, place + steps[event.key]))]);
  });
}
